"""The fields that the quickstart data asks about; read by make_quickstart_data.py.

One row a field: path in the Factbook's JSON | question up to "of PLACE?" | kind of answer. Kinds:
  number  the leading number with its sign, "$", "%" and million / billion / trillion; the unit after it is cut
  unit    the same with its unit (km, sq km, m, years, nm), for fields that are read with one
  text    the words before the first "(" or ";"
  date    as text, but it must hold a month's name
  list    the first entry of a list
  partner the first country of "UAE 26%, China 19%"
  peak    the name before the height
"""

ROWS = """
Geography/Area/total|total area|unit
Geography/Area/land|land area|unit
Geography/Area/water|water area|unit
Geography/Land boundaries/total|total length of the land boundaries|unit
Geography/Coastline|length of the coastline|unit
Geography/Elevation/highest point|highest point|peak
Geography/Elevation/lowest point|lowest point|peak
Geography/Elevation/mean elevation|mean elevation|unit
Geography/Irrigated land|irrigated land|unit
Geography/Location|location|text
Geography/Map references|map reference|text
Geography/Climate|climate|text
Geography/Land use/agricultural land|share of agricultural land|number
Geography/Land use/agricultural land: arable land|share of arable land|number
Geography/Land use/agricultural land: permanent crops|share of permanent crops|number
Geography/Land use/agricultural land: permanent pasture|share of permanent pasture|number
Geography/Land use/forest|share of forest|number
Geography/Land use/other|share of other land use|number
Geography/Maritime claims/territorial sea|territorial sea|unit
Geography/Maritime claims/exclusive economic zone|exclusive economic zone|unit
People and Society/Population/total|total population|number
People and Society/Population/male|male population|number
People and Society/Population/female|female population|number
People and Society/Nationality/noun|nationality noun|text
People and Society/Nationality/adjective|nationality adjective|text
People and Society/Population growth rate|population growth rate|number
People and Society/Birth rate|birth rate|number
People and Society/Death rate|death rate|number
People and Society/Net migration rate|net migration rate|number
People and Society/Dependency ratios/total dependency ratio|total dependency ratio|number
People and Society/Dependency ratios/youth dependency ratio|youth dependency ratio|number
People and Society/Dependency ratios/elderly dependency ratio|elderly dependency ratio|number
People and Society/Dependency ratios/potential support ratio|potential support ratio|number
People and Society/Age structure/0-14 years|share of people aged 0-14 years|number
People and Society/Age structure/15-64 years|share of people aged 15-64 years|number
People and Society/Age structure/65 years and over|share of people aged 65 years and over|number
People and Society/Median age/total|total median age|unit
People and Society/Median age/male|male median age|unit
People and Society/Median age/female|female median age|unit
People and Society/Urbanization/urban population|urban population|number
People and Society/Urbanization/rate of urbanization|rate of urbanization|number
People and Society/Sex ratio/at birth|sex ratio at birth|number
People and Society/Sex ratio/total population|sex ratio of the total population|number
People and Society/Sex ratio/65 years and over|sex ratio at 65 years and over|number
People and Society/Infant mortality rate/total|total infant mortality rate|number
People and Society/Infant mortality rate/male|male infant mortality rate|number
People and Society/Infant mortality rate/female|female infant mortality rate|number
People and Society/Life expectancy at birth/total population|life expectancy at birth of the total population|unit
People and Society/Life expectancy at birth/male|male life expectancy at birth|unit
People and Society/Life expectancy at birth/female|female life expectancy at birth|unit
People and Society/Total fertility rate|total fertility rate|number
People and Society/Gross reproduction rate|gross reproduction rate|number
People and Society/Maternal mortality ratio|maternal mortality ratio|number
People and Society/Mother's mean age at first birth|mother's mean age at first birth|unit
People and Society/Drinking water source/improved: total|total improved drinking water source|number
People and Society/Drinking water source/improved: rural|rural improved drinking water source|number
People and Society/Sanitation facility access/improved: total|total improved sanitation facility access|number
People and Society/Sanitation facility access/unimproved: total|total unimproved sanitation facility access|number
People and Society/Physician density|physician density|number
People and Society/Hospital bed density|hospital bed density|number
People and Society/Health expenditure/Health expenditure (as % of GDP)|health expenditure as % of GDP|number
People and Society/Education expenditure/Education expenditure (% GDP)|education expenditure as % of GDP|number
People and Society/Obesity - adult prevalence rate|adult prevalence rate of obesity|number
People and Society/Alcohol consumption per capita/total|total alcohol consumption per capita|number
People and Society/Alcohol consumption per capita/beer|beer alcohol consumption per capita|number
People and Society/Alcohol consumption per capita/wine|wine alcohol consumption per capita|number
People and Society/Tobacco use/total|total tobacco use|number
People and Society/Tobacco use/male|male tobacco use|number
People and Society/Tobacco use/female|female tobacco use|number
People and Society/Children under the age of 5 years underweight|share of underweight children under the age of 5 years|number
People and Society/Currently married women (ages 15-49)|share of currently married women|number
People and Society/Literacy/total population|literacy of the total population|number
People and Society/Literacy/male|male literacy|number
People and Society/Literacy/female|female literacy|number
People and Society/School life expectancy (primary to tertiary education)/total|total school life expectancy|unit
Environment/Carbon dioxide emissions/total emissions|total carbon dioxide emissions|number
Environment/Waste and recycling/municipal solid waste generated annually|municipal solid waste generated annually|number
Environment/Waste and recycling/percent of municipal solid waste recycled|percent of municipal solid waste recycled|number
Environment/Particulate matter emissions|particulate matter emissions|number
Environment/Total water withdrawal/municipal|municipal water withdrawal|number
Environment/Total water withdrawal/industrial|industrial water withdrawal|number
Environment/Total water withdrawal/agricultural|agricultural water withdrawal|number
Environment/Total renewable water resources|total renewable water resources|number
Government/Country name/conventional long form|conventional long form of the country name|text
Government/Country name/local short form|local short form of the country name|text
Government/Government type|government type|text
Government/Capital/name|capital|text
Government/Capital/time difference|time difference of the capital|text
Government/Independence|date of independence|date
Government/National holiday|national holiday|text
Government/Suffrage|voting age|text
Government/Executive branch/chief of state|chief of state|text
Government/Executive branch/head of government|head of government|text
Government/Executive branch/most recent election date|most recent election date|date
Government/Legislative branch/legislature name|legislature name|text
Government/Legislative branch/legislative structure|legislative structure|text
Government/Legislative branch/number of seats|number of seats of the legislature|number
Government/Legislative branch/term in office|term in office of the legislature|text
Government/Legislative branch/electoral system|electoral system of the legislature|text
Government/Legislative branch/percentage of women in chamber|percentage of women in the chamber|number
Government/Legislative branch - lower chamber/chamber name|name of the lower chamber|text
Government/Legislative branch - lower chamber/number of seats|number of seats of the lower chamber|number
Government/Legislative branch - lower chamber/percentage of women in chamber|percentage of women in the lower chamber|number
Government/Legislative branch - upper chamber/number of seats|number of seats of the upper chamber|number
Government/National symbol(s)|national symbol|text
Government/National color(s)|national colors|text
Government/Citizenship/residency requirement for naturalization|residency requirement for naturalization|text
Government/Citizenship/dual citizenship recognized|recognition of dual citizenship|text
Government/National heritage/total World Heritage Sites|total World Heritage Sites|number
Government/International organization participation|first international organization|list
Economy/GDP (official exchange rate)|GDP at the official exchange rate|number
Economy/Real GDP growth rate/Real GDP growth rate 2023|2023 real GDP growth rate|number
Economy/Real GDP growth rate/Real GDP growth rate 2024|2024 real GDP growth rate|number
Economy/Real GDP per capita/Real GDP per capita 2023|2023 real GDP per capita|number
Economy/Real GDP (purchasing power parity)/Real GDP (purchasing power parity) 2023|2023 real GDP at purchasing power parity|number
Economy/Inflation rate (consumer prices)/Inflation rate (consumer prices) 2023|2023 inflation rate|number
Economy/Inflation rate (consumer prices)/Inflation rate (consumer prices) 2022|2022 inflation rate|number
Economy/Unemployment rate/Unemployment rate 2023|2023 unemployment rate|number
Economy/Youth unemployment rate (ages 15-24)/total|total youth unemployment rate|number
Economy/Youth unemployment rate (ages 15-24)/male|male youth unemployment rate|number
Economy/Youth unemployment rate (ages 15-24)/female|female youth unemployment rate|number
Economy/GDP - composition, by sector of origin/agriculture|agriculture sector share of GDP|number
Economy/GDP - composition, by sector of origin/industry|industry sector share of GDP|number
Economy/GDP - composition, by sector of origin/services|services sector share of GDP|number
Economy/GDP - composition, by end use/household consumption|household consumption share of GDP|number
Economy/GDP - composition, by end use/government consumption|government consumption share of GDP|number
Economy/GDP - composition, by end use/investment in fixed capital|fixed capital investment share of GDP|number
Economy/GDP - composition, by end use/exports of goods and services|exports share of GDP|number
Economy/GDP - composition, by end use/imports of goods and services|imports share of GDP|number
Economy/Labor force|labor force|number
Economy/Population below poverty line|population below the poverty line|number
Economy/Household income or consumption by percentage share/lowest 10%|income share of the lowest 10%|number
Economy/Household income or consumption by percentage share/highest 10%|income share of the highest 10%|number
Economy/Remittances/Remittances 2023|2023 remittances|number
Economy/Budget/revenues|budget revenues|number
Economy/Budget/expenditures|budget expenditures|number
Economy/Taxes and other revenues|taxes and other revenues|number
Economy/Exports/Exports 2023|2023 exports|number
Economy/Imports/Imports 2023|2023 imports|number
Economy/Current account balance/Current account balance 2023|2023 current account balance|number
Economy/Industrial production growth rate|industrial production growth rate|number
Economy/Exchange rates/Currency|currency|text
Economy/Exchange rates/Exchange rates 2023|2023 exchange rate|number
Economy/Exports - partners|first export partner|partner
Economy/Imports - partners|first import partner|partner
Economy/Exports - commodities|first export commodity|list
Economy/Imports - commodities|first import commodity|list
Economy/Agricultural products|first agricultural product|list
Economy/Industries|first industry|list
Energy/Electricity access/electrification - total population|electrification of the total population|number
Energy/Electricity/installed generating capacity|installed generating capacity of electricity|number
Energy/Electricity/consumption|electricity consumption|number
Energy/Electricity generation sources/fossil fuels|fossil fuels share of electricity generation|number
Energy/Electricity generation sources/solar|solar share of electricity generation|number
Energy/Electricity generation sources/hydroelectricity|hydroelectricity share of electricity generation|number
Energy/Petroleum/refined petroleum consumption|refined petroleum consumption|number
Energy/Energy consumption per capita/Total energy consumption per capita 2023|2023 total energy consumption per capita|number
Communications/Internet country code|internet country code|text
Communications/Internet users/percent of population|percent of internet users|number
Communications/Telephones - fixed lines/total subscriptions|total fixed lines subscriptions|number
Communications/Telephones - mobile cellular/total subscriptions|total mobile cellular subscriptions|number
Communications/Telephones - mobile cellular/subscriptions per 100 inhabitants|mobile cellular subscriptions per 100 inhabitants|number
Communications/Broadband - fixed subscriptions/total|total fixed broadband subscriptions|number
Communications/Broadband - fixed subscriptions/subscriptions per 100 inhabitants|fixed broadband subscriptions per 100 inhabitants|number
Transportation/Civil aircraft registration country code prefix|civil aircraft registration prefix|text
Transportation/Airports|number of airports|number
Transportation/Heliports|number of heliports|number
Transportation/Railways/total|total length of the railways|unit
Transportation/Merchant marine/total|total merchant marine|number
Transportation/Ports/total ports|total ports|number
Transportation/Ports/key ports|first key port|list
Military and Security/Military expenditures/Military Expenditures 2023|2023 military expenditures|number
Transnational Issues/Refugees and internally displaced persons/refugees|number of refugees|number
"""


def fields():
    """[(path as a tuple, noun phrase of the question, kind)], in the order of the page."""
    rows = [line.split("|") for line in ROWS.strip().splitlines()]
    return [(tuple(path.split("/")), phrase, kind) for path, phrase, kind in rows]
